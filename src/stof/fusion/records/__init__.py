"""What is kept: measurements, choices, lock files and reports."""
