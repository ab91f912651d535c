"""The version of gradcomp, written only here."""

VERSION = "0.1.0"
