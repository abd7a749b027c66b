"""Images larger than a rank: data sets of which each rank reads its tiles, and inference on what nothing holds."""
