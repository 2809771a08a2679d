"""What a part of the data says of its ids, and what a policy moves when it is run on them."""
