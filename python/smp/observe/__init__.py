"""What a run shows of itself: timelines, metrics, non-finite values, its first step checked."""
