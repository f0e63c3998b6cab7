"""Pipeline parallelism: schedules as data, a validator, and one executor that runs them."""
