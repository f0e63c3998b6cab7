"""End of all processes of a job when one fails: reports of a rank's failure, process watches, and
worker processes.
"""
