"""Whether learning online pays, and whose text and which recipe a draft should learn from."""
