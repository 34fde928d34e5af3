"""A run as a job of Slurm: Slurm has the hosts, flexmarl places actors on them.

The head of the run is in the batch script, on the first host of the job. One ``srun`` starts ``flexmarl node`` on the
others. The job ends with the head, and frees its hosts.
"""
