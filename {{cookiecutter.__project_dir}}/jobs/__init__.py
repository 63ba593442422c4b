'''One script is one job, and `inv submit NAME` runs jobs/NAME.py. A small one, for example jobs/hello.py:

    """Greets somebody."""

    from raymill.job import Job, connect
    from raymill.settings import Section


    class HelloOptions(Section):
        """The [hello] section of settings.toml."""

        name: str
        """Whom to greet."""


    JOB = Job(HelloOptions, "hello")  # reads the section and the command line; import torch and ray below it

    import ray


    def main(options: HelloOptions) -> None:
        """Greet somebody from the cluster."""
        connect()
        print(ray.get(ray.remote(lambda: f"hello {options.name}").remote()))


    JOB.run(main)

Its section in settings.toml, which needs each option that has no default:

    [hello]
    name = "Ada"

[local.hello] and [cluster.hello] hold what differs between this machine and AWS. A misspelled key is an error in every
verb. `inv submit hello -- --name Grace` overrides the section, and `-- --help` shows the options.
'''
