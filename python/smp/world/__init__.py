"""The ranks: what started them, how they meet, talk and end; the runtime object of a process."""
