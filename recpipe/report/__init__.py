"""What a run leaves: report.json (record), the table on the terminal (terminal) and report.html (html)."""
