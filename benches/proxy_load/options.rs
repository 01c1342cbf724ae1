//! The command line: a mode, then pairs of a name and a value.

use std::collections::HashMap;
use std::error::Error;
use std::str::FromStr;

/// What was asked for.
pub(crate) struct Options(HashMap<String, String>);

impl Options {
    /// The mode and the options of a command line.
    pub(crate) fn read(words: impl Iterator<Item = String>) -> Result<(String, Self), Box<dyn Error>> {
        let mut words = words.filter(|word| word != "--bench");
        let mode = words.next().ok_or("a mode is missing")?;
        let mut options = HashMap::new();
        while let Some(name) = words.next() {
            let name = name.strip_prefix("--").ok_or_else(|| format!("no option: `{name}`"))?;
            let value = words.next().ok_or_else(|| format!("`--{name}` needs a value"))?;
            options.insert(name.to_owned(), value);
        }
        Ok((mode, Self(options)))
    }

    /// The value of an option that must be there.
    pub(crate) fn get<T: FromStr>(&self, name: &str) -> Result<T, Box<dyn Error>> {
        let text = self.0.get(name).ok_or_else(|| format!("`--{name}` is missing"))?;
        text.parse().map_err(|_| format!("`--{name}` cannot be `{text}`").into())
    }

    /// A span given in seconds, in nanoseconds.
    pub(crate) fn span_ns(&self, name: &str) -> Result<u64, Box<dyn Error>> {
        let seconds: f64 = self.get(name)?;
        let span = std::time::Duration::try_from_secs_f64(seconds)?;
        Ok(u64::try_from(span.as_nanos())?)
    }
}
