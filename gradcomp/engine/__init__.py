"""The engine drives compressors: it collects gradients in buckets, adds error feedback and delivers the updates."""
