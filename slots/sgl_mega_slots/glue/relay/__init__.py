"""`relay`: lengths and bonus tokens handed to the next step on the device in one launch."""
