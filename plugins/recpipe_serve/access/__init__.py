"""What is told of each request after it was answered: lines of an access log, and spans of traces."""
