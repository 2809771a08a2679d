"""What a part of the data says of its ids: what caches miss and move, for every budget."""
