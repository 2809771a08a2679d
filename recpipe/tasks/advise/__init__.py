"""``task=advise``: the recipes for this data, model and machine, with their predicted speed and reasons."""
