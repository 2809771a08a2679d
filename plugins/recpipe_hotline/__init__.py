"""Hotline (Adnan et al., ISCA 2024): popular and non-popular micro-batches over tiered embeddings."""
