"""A served model that stays fresh: deltas taken while requests are answered, judged before, and undone."""
