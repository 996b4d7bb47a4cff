"""Who runs it: configuration, worker processes, model runners, launcher, benchmark and command line."""
