"""What is to be planned, and what a plan is: cases, links, plans, the rules that paths keep."""
