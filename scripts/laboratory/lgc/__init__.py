"""The phases of lgc, and the redundancy that they live on."""
