"""A run in processes that torchrun has started, one or several on each host.

    first host    local rank 0   head of the run, and one of its hosts: as `flexmarl train RECIPE --nodes N`
                  others         wait for its end
    other hosts   local rank 0   node of the run: as `flexmarl node --join runs/NAME/address`
                  others         wait for its end

Address and keys are in the run's folder, on a disk that all hosts share. All processes end with the status of the run.
A restart by torchrun continues the run from its newest checkpoint, with the hosts that are there then.
"""
