"""What clients speak: bodies into conversations, and answers into what each protocol writes."""
