"""From verified draft tokens to traces: which rows are kept, and how requests become traces."""
