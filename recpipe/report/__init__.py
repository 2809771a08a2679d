"""A run's report: report.json (record), the table on the terminal (terminal) and report.html (html)."""
