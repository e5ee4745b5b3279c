"""Why is my acceptance low?  Every input of a drafter against what it should be, and known faults to compare with.

Verification repairs bad drafts, so a fault in drafting leaves the text right and shows in acceptance alone.
"""
