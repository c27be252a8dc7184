"""MetaSchedule finds the schedule: search, worker processes, log, promotion."""
