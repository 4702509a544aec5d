"""Forms of answers as grammars, in the form that llguidance reads."""
