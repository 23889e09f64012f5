"""Layers that don't mix tokens: normalisation, positions, feed-forward networks, embeddings and heads."""
