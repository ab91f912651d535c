"""The report writer: tables, progress, result files and pictures."""
