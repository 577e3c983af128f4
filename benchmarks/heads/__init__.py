"""What an EAGLE-3 head gains and costs, beside a draft model."""
