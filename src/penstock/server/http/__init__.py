"""HTTP itself: connections, bodies, who may come in, errors, the description. Knows no models."""
