"""Pipeline parallelism: schedules as data, a proof on paper, and one executor that runs them."""
