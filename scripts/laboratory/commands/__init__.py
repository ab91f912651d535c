"""The subcommands of scripts/lab, one file each: options in, a table and a result file out."""
