"""Neo (ISCA'22): embedding tables split, then placed over the ranks so that their measured costs balance."""
