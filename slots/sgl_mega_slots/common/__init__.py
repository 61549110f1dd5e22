"""What several slots share: argument checks, device functions, random numbers, case helpers."""
