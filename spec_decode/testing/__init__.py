"""What checks, tools and tests share: oracles, fixtures, process isolation."""
