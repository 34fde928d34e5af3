"""Outputs of a run's metrics beside its files: TensorBoard, Weights & Biases, MLflow, Prometheus,
OpenTelemetry, functions.

A sink has a thread of its own with a bounded queue: it can neither stop nor delay the run. Its modules:

    sink.py                the interface
    sink_config.py         the section ``sinks`` of the config
    sink_thread.py         the thread of one sink: it opens, feeds and closes it, and counts its errors
    run_sinks.py           the sinks of a run, and its steps and evaluations as figures by name
    sink_series.py         a series that a resumed run continues
    tensorboard_sink.py, wandb_sink.py, mlflow_sink.py, prometheus_sink.py, opentelemetry_sink.py,
    function_sink.py
"""
