"""Which strategy for this job? And did the run go as the plan said?"""
