"""Commands about models that need no device: where models come from, what is printed."""
