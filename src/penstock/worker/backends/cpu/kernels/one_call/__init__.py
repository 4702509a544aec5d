"""Steps of single rows: all layers of the common shape in one compiled call."""
