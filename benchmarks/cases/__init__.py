"""What is timed, a file for each kind of comparison."""
