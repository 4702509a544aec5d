"""One file per protocol: parse, ask, render."""
