"""Looking at programs while they run."""
