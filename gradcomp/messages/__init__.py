"""Messages between ranks: arrays in one byte buffer, and the forms of sparse entries, rounded entries and places."""
