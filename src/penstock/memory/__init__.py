"""The books of bytes: limits, readings, costs and admission. No torch."""
