"""What was measured on a machine: its profile in a file."""
