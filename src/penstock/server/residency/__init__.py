"""Which models are loaded, what memory they hold, and what is done when memory is short."""
