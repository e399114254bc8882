//! Alerts by e-mail.

use std::sync::Arc;

use postrider::Result;

use super::Sink;
use crate::config::SmtpSink;

#[cfg(feature = "smtp")]
pub fn build(config: &SmtpSink) -> Result<Arc<dyn Sink>> {
    mail::Mail::new(config).map(|mail| Arc::new(mail) as Arc<dyn Sink>)
}

/// This build cannot.
#[cfg(not(feature = "smtp"))]
pub fn build(_: &SmtpSink) -> Result<Arc<dyn Sink>> {
    Err(crate::wire::not_built("e-mail", "smtp"))
}

#[cfg(feature = "smtp")]
mod mail {
    use async_trait::async_trait;
    use lettre::message::Mailbox;
    use lettre::message::header::ContentType;
    use lettre::transport::smtp::Error as SmtpError;
    use lettre::transport::smtp::authentication::Credentials;
    use lettre::transport::smtp::client::{Tls, TlsParameters};
    use lettre::{AsyncSmtpTransport, AsyncTransport, Tokio1Executor};
    use postrider::{Error, Kind, Result};

    use super::super::{Message, Sink, TELL_WAIT};
    use crate::config::{SmtpSink, SmtpTls};

    /// A mail server.
    pub struct Mail {
        transport: AsyncSmtpTransport<Tokio1Executor>,
        from: Mailbox,
        to: Vec<Mailbox>,
    }

    impl Mail {
        /// Connects when it is first needed.
        pub fn new(config: &SmtpSink) -> Result<Self> {
            let mailbox = |address: &String| {
                let wrong = |_| Error::new(Kind::Config, "from or to is no address such as \"ops@shop.example\"");
                address.parse().map(|address| Mailbox::new(None, address)).map_err(wrong)
            };
            let parameters = || {
                let wrong = |error| Error::new(Kind::Config, "TLS cannot be set up").with_source(error);
                TlsParameters::new(config.host.clone()).map_err(wrong)
            };
            let tls = match config.tls {
                SmtpTls::StartTls => Tls::Required(parameters()?),
                SmtpTls::Tls => Tls::Wrapper(parameters()?),
                SmtpTls::None => Tls::None,
            };
            let mut builder = AsyncSmtpTransport::<Tokio1Executor>::builder_dangerous(&config.host)
                .port(config.port)
                .tls(tls)
                .timeout(Some(TELL_WAIT));
            if let Some((user, password)) = &config.login {
                builder = builder.credentials(Credentials::new(user.clone(), password.expose().to_owned()));
            }
            let to = config.to.iter().map(mailbox).collect::<Result<_>>()?;
            Ok(Self { transport: builder.build(), from: mailbox(&config.from)?, to })
        }
    }

    #[async_trait]
    impl Sink for Mail {
        async fn tell(&self, message: &Message) -> Result<()> {
            let mut mail = lettre::Message::builder()
                .from(self.from.clone())
                .subject(message.title())
                .header(ContentType::TEXT_PLAIN);
            for receiver in &self.to {
                mail = mail.to(receiver.clone());
            }
            // The same at every try: a server that has it already may drop the second.
            let host = self.from.email.domain();
            let mail = mail.message_id(Some(format!("<{}@{host}>", message.id))).body(message.text());
            let mail =
                mail.map_err(|error| Error::new(Kind::Invalid, "the mail cannot be written").with_source(error))?;
            self.transport.send(mail).await.map(drop).map_err(of)
        }
    }

    /// Our error for one of the mail server's. Its texts are for people and hold no message.
    fn of(error: SmtpError) -> Error {
        let (kind, what) = if error.is_permanent() {
            match error.status().map(u16::from) {
                Some(530 | 534 | 535 | 538) => (Kind::Denied, "the mail server refused user and password"),
                _ => (Kind::Refused, "the mail server refused the message"),
            }
        } else if error.is_tls() {
            (Kind::Unavailable, "there is no protected connection to the mail server")
        } else {
            (Kind::Unavailable, "the mail server does not take messages")
        };
        Error::new(kind, what).with_source(error)
    }
}
