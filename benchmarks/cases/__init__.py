"""What is timed, one file per kind of comparison."""
