"""Child processes: the fork server, workers, grammar hosts, and their logs."""
