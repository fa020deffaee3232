"""Dense masks and masks of bits that change in every step."""
