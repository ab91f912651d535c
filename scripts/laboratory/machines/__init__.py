"""The matrix of bare machines on which scripts/demo must run from nothing. Plain Python: it runs before gradcomp is built."""
