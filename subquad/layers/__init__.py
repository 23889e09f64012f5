"""The parts of a model that do not mix tokens: normalisation, positions, feed-forward, embedding."""
