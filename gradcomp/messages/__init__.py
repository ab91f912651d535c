"""Messages between ranks: arrays in one byte buffer, and the forms of sparse, rounded and placed entries."""
